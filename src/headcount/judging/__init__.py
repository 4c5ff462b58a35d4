"""How good it is: metrics, runs, records, and the rules that choose among them."""
