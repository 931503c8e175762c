"""Compare two methods or more on the same work.

    method_comparison   `collect`: throughput, memory and traffic of each method
    equal_time          `train --against`: two runs, at equal samples and at equal time
"""
