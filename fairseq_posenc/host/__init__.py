"""Start-up of fairseq's commands: guards against lost runs, and numpy's old names."""
