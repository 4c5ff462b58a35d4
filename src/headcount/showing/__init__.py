"""What people see: records become figures, and figures become one page that opens anywhere."""
