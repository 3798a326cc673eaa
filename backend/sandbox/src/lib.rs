//! Seccomp filters of the backend processes, a reason per rule.
