"""What confines a program: namespaces, Landlock, seccomp, cgroup, limits."""
