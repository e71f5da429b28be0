"""What runs inside the sandbox: the zygote, its single-use children, and one program."""
