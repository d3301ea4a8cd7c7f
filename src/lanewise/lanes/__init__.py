"""The arithmetic of lanes and slots: integers only, no torch, no communication."""
