"""How bytes get from rank to rank: through memory that ranks of one host share, or as messages."""
