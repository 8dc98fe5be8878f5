"""What a step costs, as ratios against the loop that one would write by hand, measured in the same run."""
