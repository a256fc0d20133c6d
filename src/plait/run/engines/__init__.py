"""Engines that start a run: what a person would type for one (command lines, a batch script, a manifest), and tasks on
the hosts of Ray and Spark. Their packages are imported when they are used."""
