"""What fairseq's commands need mended: numpy's old names, guards against lost runs, start-up."""
