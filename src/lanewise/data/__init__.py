"""Data for lanes: which samples a lane gets, and how they are loaded."""
