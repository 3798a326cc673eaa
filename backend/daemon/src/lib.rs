//! sluiced: registry, launcher and, later, the management API.
