"""What devices did and when: the one event record of all backends, its columns, and the files that hold them."""
