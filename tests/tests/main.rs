//! Tests of the whole system; a file each, all in one binary.

// Runs: alone
mod attacks;
mod canary;
mod chaos;
// Runs: in VMs
mod cloud_hypervisor;
mod compat;
mod confinement;
mod conformance;
mod containers;
mod counts;
mod custody;
mod direct;
mod driver_abilities;
mod escape;
// Runs: alone
mod filter_rules;
mod fixed_arena;
// Runs: in VMs
mod firecracker;
// Runs: in VMs
mod guest;
mod hostile;
mod hostile_device;
// Runs: in VMs
mod limits;
mod management;
mod mig;
mod mutants;
// Runs: alone, in VMs
mod newcomer;
mod packages;
mod refusals;
mod runtimes;
mod succession;
// Runs: alone
mod time;
mod units;
// Runs: alone, in VMs
mod vm;
// Runs: alone, in VMs
mod vmms;
mod vsock;
