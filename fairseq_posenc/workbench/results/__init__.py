"""Results: the record that every command writes, tables, pictures, statistics over seeds."""
