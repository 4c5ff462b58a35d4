"""Where bags come from: labelled sources sent through the paper's protocol."""
