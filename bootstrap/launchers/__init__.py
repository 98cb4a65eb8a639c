"""Start of commands that are not torchrun's: a program on every node, or mpirun on the first one."""
