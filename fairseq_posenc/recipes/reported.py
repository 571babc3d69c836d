"""The tables of results that the papers report, by name."""

# By the paper's own number or, where a figure or the text has the numbers, by that.
TABLES = {
    **{"A1": "m4m_table1", "A-loss": "m4m_losses", "A2": "m4m_table2", "A-raffel": "m4m_raffel"},
    **{f"A{number}": f"m4m_table{number}" for number in range(3, 8)},
    **{f"B{number}": f"decbert_table{number}" for number in range(1, 5)},
    **{"B-figure2": "decbert_figure2", "B-figure4": "decbert_figure4", "C": "fr_en"},
}
