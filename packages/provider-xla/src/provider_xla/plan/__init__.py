"""Plans: what rules do to a program and its parameters, and the parameters stored by one."""
