"""Who published an entry: keys, signed statements, and the policy that says which of them count. No store is read here."""
