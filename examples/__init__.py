"""Examples of use; `demo.py` is the main one."""
