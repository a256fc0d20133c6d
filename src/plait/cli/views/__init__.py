"""What commands print: tables and pictures for a console."""
