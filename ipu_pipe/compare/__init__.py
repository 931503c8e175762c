"""Compare two methods or more on the same work.

method_comparison   throughput, memory and traffic of each method: `compare_methods`
equal_time          two runs at equal samples and at equal time: `train_against`
"""
