"""The command ``jaxtap trace``, which lists the operations of a program."""
