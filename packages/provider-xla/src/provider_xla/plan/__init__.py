"""Plans: what rules do to a program, and parameters stored by one."""
