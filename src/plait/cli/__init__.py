"""The command line: run, graph, verify, report, export."""
