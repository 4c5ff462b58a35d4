"""A person's own data, read as bags: folders, tables, texts, arrays and slide features."""
