//! The GPU models that a soft device can report. A row has everything that belongs together: name, capability, sizes, division.
//!
//! The engine is the same for all. The default model has the capability with which most clients run: what is compiled for 8.0, by
//! a vendor's compiler or at run time, needs neither clusters nor tensor copies nor products of a warp group, which the engine
//! does not execute, and the vendor's libraries for FFT and random numbers have PTX for 7.5. Programs that need the PTX for 12.0 of
//! other libraries choose a model of that capability. No GPU of 8.0 has the default model's sizes, so it has a name of its own.

use crate::capability::Capability;

/// The unit in which device memory is owned and mapped.
pub const PAGE_BYTES: u64 = 2 << 20;

/// The properties of a GPU model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// The name in the configuration.
    pub key: &'static str,
    /// The name that CUDA and NVML report.
    pub name: &'static str,
    /// Memory of the board in MiB, before scaling.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Second level cache in bytes.
    pub l2_bytes: u32,
    /// Width of the memory bus in bits.
    pub bus_bits: u32,
    /// Core clock in kHz.
    pub clock_khz: u32,
    /// Memory clock in kHz.
    pub memory_clock_khz: u32,
    /// The compute capability.
    pub capability: &'static Capability,
    /// The row of the table of divisions, if the model can be divided into instances.
    pub division: Option<&'static str>,
}

/// Every model, the default first.
pub const MODELS: &[Model] = &[
    Model {
        key: "SLUICE-141",
        name: "Sluice Software GPU",
        memory_mib: 143_771,
        multiprocessors: 132,
        l2_bytes: 60 << 20,
        bus_bits: 6144,
        clock_khz: 1_980_000,
        memory_clock_khz: 3_201_000,
        capability: &Capability::V8_0,
        division: Some("h200-141"),
    },
    Model {
        key: "T4-16",
        name: "Tesla T4",
        memory_mib: 15_360,
        multiprocessors: 40,
        l2_bytes: 4 << 20,
        bus_bits: 256,
        clock_khz: 1_590_000,
        memory_clock_khz: 5_001_000,
        capability: &Capability::V7_5,
        division: None,
    },
    Model {
        key: "A100-80",
        name: "NVIDIA A100-SXM4-80GB",
        memory_mib: 81_920,
        multiprocessors: 108,
        l2_bytes: 40 << 20,
        bus_bits: 5120,
        clock_khz: 1_410_000,
        memory_clock_khz: 1_593_000,
        capability: &Capability::V8_0,
        division: Some("a100-80"),
    },
    Model {
        key: "A100-40",
        name: "NVIDIA A100-SXM4-40GB",
        memory_mib: 40_960,
        multiprocessors: 108,
        l2_bytes: 40 << 20,
        bus_bits: 5120,
        clock_khz: 1_410_000,
        memory_clock_khz: 1_215_000,
        capability: &Capability::V8_0,
        division: Some("a100-40"),
    },
    Model {
        key: "A30-24",
        name: "NVIDIA A30",
        memory_mib: 24_576,
        multiprocessors: 56,
        l2_bytes: 24 << 20,
        bus_bits: 3072,
        clock_khz: 1_440_000,
        memory_clock_khz: 1_215_000,
        capability: &Capability::V8_0,
        division: Some("a30-24"),
    },
    Model {
        key: "A10-24",
        name: "NVIDIA A10",
        memory_mib: 23_028,
        multiprocessors: 72,
        l2_bytes: 6 << 20,
        bus_bits: 384,
        clock_khz: 1_695_000,
        memory_clock_khz: 6_251_000,
        capability: &Capability::V8_6,
        division: None,
    },
    Model {
        key: "RTXA6000-48",
        name: "NVIDIA RTX A6000",
        memory_mib: 49_140,
        multiprocessors: 84,
        l2_bytes: 6 << 20,
        bus_bits: 384,
        clock_khz: 1_800_000,
        memory_clock_khz: 8_001_000,
        capability: &Capability::V8_6,
        division: None,
    },
    Model {
        key: "L4-24",
        name: "NVIDIA L4",
        memory_mib: 23_034,
        multiprocessors: 58,
        l2_bytes: 48 << 20,
        bus_bits: 192,
        clock_khz: 2_040_000,
        memory_clock_khz: 6_251_000,
        capability: &Capability::V8_9,
        division: None,
    },
    Model {
        key: "L40S-48",
        name: "NVIDIA L40S",
        memory_mib: 46_068,
        multiprocessors: 142,
        l2_bytes: 96 << 20,
        bus_bits: 384,
        clock_khz: 2_520_000,
        memory_clock_khz: 9_001_000,
        capability: &Capability::V8_9,
        division: None,
    },
    Model {
        key: "H100-80",
        name: "NVIDIA H100 80GB HBM3",
        memory_mib: 81_559,
        multiprocessors: 132,
        l2_bytes: 50 << 20,
        bus_bits: 5120,
        clock_khz: 1_980_000,
        memory_clock_khz: 2_619_000,
        capability: &Capability::V9_0,
        division: Some("h100-80"),
    },
    Model {
        key: "H200-141",
        name: "NVIDIA H200",
        memory_mib: 143_771,
        multiprocessors: 132,
        l2_bytes: 60 << 20,
        bus_bits: 6144,
        clock_khz: 1_980_000,
        memory_clock_khz: 3_201_000,
        capability: &Capability::V9_0,
        division: Some("h200-141"),
    },
    Model {
        key: "RTX5090-32",
        name: "NVIDIA GeForce RTX 5090",
        memory_mib: 32_607,
        multiprocessors: 170,
        l2_bytes: 96 << 20,
        bus_bits: 512,
        clock_khz: 2_407_000,
        memory_clock_khz: 14_001_000,
        capability: &Capability::V12_0,
        division: None,
    },
];

impl Model {
    /// Finds a model by its key, in any case.
    #[must_use]
    pub fn find(key: &str) -> Option<&'static Model> {
        MODELS.iter().find(|model| model.key.eq_ignore_ascii_case(key))
    }

    /// Returns the largest scale at which a device of this model has at least this many bytes; `None` if the model has fewer.
    #[must_use]
    pub fn scale_for(&self, bytes: u64) -> Option<u64> {
        let whole = self.pages(1).saturating_mul(PAGE_BYTES);
        Some(whole / bytes.max(PAGE_BYTES)).filter(|scale| *scale > 0)
    }

    /// Returns the pages of a device of this model at this scale; never zero.
    #[must_use]
    pub fn pages(&self, scale: u64) -> u64 {
        (self.memory_mib / 2 / scale.max(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_of_a_requested_size_is_at_least_as_large() {
        for model in MODELS {
            for bytes in [1, 1 << 20, 1 << 30, 4 << 30, 13_000_000_000] {
                let scale = model.scale_for(bytes).unwrap();
                assert!(model.pages(scale) * PAGE_BYTES >= bytes, "{}: {bytes} at {scale}", model.key);
            }
            assert_eq!(model.scale_for(1 << 40), None, "{}", model.key);
        }
    }

    // Promise: S62
    #[test]
    fn rows_of_the_table_have_what_belongs_together() {
        let by_key = |key: &str| Model::find(key).unwrap();
        for (key, sm, divides) in [
            ("T4-16", 75, false),
            ("A100-80", 80, true),
            ("A30-24", 80, true),
            ("A10-24", 86, false),
            ("L4-24", 89, false),
            ("H100-80", 90, true),
            ("H200-141", 90, true),
            ("RTX5090-32", 120, false),
        ] {
            let model = by_key(key);
            assert_eq!((model.capability.sm(), model.division.is_some()), (sm, divides), "{key}");
        }
        // No model of hardware has the default's name, so no program takes its capability for that of hardware.
        assert_eq!((MODELS[0].capability.sm(), MODELS[0].name), (80, "Sluice Software GPU"));
        for model in MODELS {
            let limits = model.capability;
            let most = limits.shared_per_block_optin + limits.shared_reserved;
            assert_eq!(most, limits.shared_per_multiprocessor, "{}", model.key);
            assert!(model.key.len() < 32, "{}: the header has room for its key", model.key);
        }
    }
}
