"""One module for each host whose models can run on attnreg. Importing this imports no host."""
