"""What leaves the machine: tuned records as folders of libraries."""
