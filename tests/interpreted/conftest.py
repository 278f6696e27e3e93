import shim  # noqa: F401 - before anything imports flash_attn
