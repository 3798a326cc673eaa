//! The soft device's memory: one shared file with its page table.
