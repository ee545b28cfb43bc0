"""What commands print: tables, bars and sizes."""
