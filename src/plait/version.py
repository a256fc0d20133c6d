"""The version, said here once: the build takes it from this file, and a tree that is not installed has it too."""

VERSION = "0.1.0"
