//! Facts that follow from a name, a number or the version: texts of UUIDs, architectures, brands.

/// The driver branch of this NVML. Clients choose structures by it: those of `nvml.h` 13. The branch supports the `CUDA_VERSION`
/// of `sluice-cuda-abi`.
pub const DRIVER_VERSION: &str = "615.0";
/// The version of the library: that of the interface, then that of the driver.
pub const NVML_VERSION: &str = "13.615.0";

/// Formats the UUID of a GPU.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    format!("GPU-{}", plain_uuid_text(uuid))
}

/// Formats the UUID of a device on an instance.
#[must_use]
pub fn mig_uuid_text(uuid: &[u8; 16]) -> String {
    format!("MIG-{}", plain_uuid_text(uuid))
}

fn plain_uuid_text(uuid: &[u8; 16]) -> String {
    let number = u128::from_be_bytes(*uuid);
    let digits = format!("{number:032x}");
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

/// `NVML_DEVICE_ARCH_*` for a compute capability.
#[must_use]
pub const fn architecture(capability: (u32, u32)) -> u32 {
    match capability {
        (7, 0..=4) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10..=12, _) => 10,
        _ => u32::MAX,
    }
}

/// Cores per multiprocessor for a compute capability, if known.
#[must_use]
pub const fn cores_per_multiprocessor(capability: (u32, u32)) -> Option<u32> {
    match capability {
        (7, _) | (8, 0) => Some(64),
        (8 | 9 | 10 | 12, _) => Some(128),
        _ => None,
    }
}

/// `NVML_BRAND_*` for the name of a GPU.
#[must_use]
pub fn brand(name: &str) -> u32 {
    const BRANDS: [(&str, u32); 6] =
        [("Tesla", 2), ("GeForce", 5), ("TITAN", 6), ("Quadro RTX", 12), ("Quadro", 1), ("RTX", 13)];
    const NVIDIA: u32 = 14;
    BRANDS.iter().find(|(word, _)| name.contains(word)).map_or(NVIDIA, |(_, brand)| *brand)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_texts_have_the_format_of_the_vendor() {
        let uuid = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(uuid_text(&uuid), "GPU-01234567-89ab-cdef-0011-223344556677");
    }

    #[test]
    fn architecture_and_cores_of_unknown_devices_are_unknown() {
        assert_eq!((architecture((8, 0)), architecture((9, 0)), architecture((99, 0))), (7, 9, u32::MAX));
        assert_eq!((cores_per_multiprocessor((8, 6)), cores_per_multiprocessor((3, 5))), (Some(128), None));
        assert_eq!((brand("NVIDIA H200"), brand("Tesla T4")), (14, 2));
    }
}
