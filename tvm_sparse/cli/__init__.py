"""The command line, `tvm-sparse`: one file for each command."""
