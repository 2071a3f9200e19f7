"""What commands print and write: tables of text, and files that an option names."""
