"""The command line, `tvm-sparse`: one file a command."""
