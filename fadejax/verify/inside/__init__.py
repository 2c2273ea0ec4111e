"""What runs inside the sandbox: standard library only. The host side imports `plain` alone."""
