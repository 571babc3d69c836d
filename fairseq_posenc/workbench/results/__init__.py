"""Results: the record that every job writes, tables, pictures, stages of a loss."""
