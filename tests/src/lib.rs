//! Whole-system tests: the common base of test binaries, the demo and the benchmarks.
//!
//! Owns: finding built programs ([`paths`]), running processes with time limits ([`process`]), Debian packages and guest kernels
//! ([`debian`]), the CUDA compiler ([`toolchain`]), test programs ([`programs`]) and clients of other releases and languages
//! ([`clients`], [`wheels`]) with the tests that these bring ([`compat`]), the host side of Sluice ([`host`]), a host with the service's daemon ([`managed`]) under a service
//! manager, the management API ([`management`]), several VMs on one device ([`tenants`]), one of them with a hostile device process
//! ([`hostile_device`]), programs that hold their memory ([`holder`]), that device's own count of memory ([`devices`]) and cgroups
//! for them ([`cgroups`]), guest images
//! ([`image`]) and the Python in some of them ([`python`]), virtual machines ([`vm`]) of any QEMU ([`qemu`]) with its monitor
//! ([`qmp`]), and in these those of other VMMs ([`nested`]), the ways to reach the device from there ([`way`]) with the record of
//! results ([`matrix`]), and huge pages ([`huge_pages`]). Must never contain product logic: the product is only ever reached as the
//! separate programs it ships.
//!
//! Folders from top to bottom: compat, packages, performance.

pub mod agent_protocol;
pub mod cgroups;
pub mod clients;
pub mod compat;
pub mod debian;
pub mod devices;
pub mod direct;
pub mod holder;
pub mod host;
pub mod hostile_device;
pub mod huge_pages;
pub mod image;
pub mod managed;
pub mod management;
pub mod matrix;
pub mod mutants;
pub mod nested;
pub mod oracle;
pub mod packages;
pub mod paths;
pub mod performance;
pub mod process;
pub mod programs;
pub mod progress;
pub mod python;
pub mod qemu;
pub mod qmp;
pub mod reach;
pub mod tenants;
pub mod toolchain;
pub mod virtual_socket;
pub mod vm;
pub mod way;
pub mod wheels;
