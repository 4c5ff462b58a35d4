"""What answers: a backbone that reads an instance and a head that hears a bag."""
