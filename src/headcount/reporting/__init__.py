"""Records and predictions as pages, figures, tables and files."""
