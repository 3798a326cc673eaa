//! The GPU models that a soft device can report: only sizes and names differ, the engine is the same.

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
    /// True if the model can be divided into instances.
    pub mig: bool,
}

/// Every model, the default first.
pub const MODELS: &[Model] = &[
    Model {
        key: "H200-141",
        name: "NVIDIA H200",
        memory_mib: 143_771,
        multiprocessors: 132,
        l2_bytes: 60 << 20,
        bus_bits: 6144,
        clock_khz: 1_980_000,
        memory_clock_khz: 3_201_000,
        mig: true,
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
        mig: true,
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
        mig: true,
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
        mig: true,
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
        mig: true,
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
        mig: false,
    },
];

impl Model {
    /// Finds a model by its key, in any case.
    #[must_use]
    pub fn find(key: &str) -> Option<&'static Model> {
        MODELS.iter().find(|model| model.key.eq_ignore_ascii_case(key))
    }

    /// Returns the pages of a device of this model at this scale; never zero.
    #[must_use]
    pub fn pages(&self, scale: u64) -> u64 {
        (self.memory_mib / 2 / scale.max(1)).max(1)
    }
}
