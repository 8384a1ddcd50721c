"""Golden cases of other implementations; see README.md."""
