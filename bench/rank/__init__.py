"""One rank of the full model: time of a step, and of each op in it against that op's bound (`fathom bench rank`)."""
