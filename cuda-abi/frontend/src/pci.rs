//! The places of devices on the PCI bus, as programs write them.

use std::fmt;

/// The place of a device on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusId {
    /// The domain.
    pub domain: u32,
    /// The bus.
    pub bus: u32,
    /// The device.
    pub device: u32,
    /// The function.
    pub function: u32,
}

impl BusId {
    /// Reads `[domain:]bus:device[.function]`, each a hexadecimal number. Parts that are left out are 0.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<BusId> {
        let text = str::from_utf8(text).ok()?;
        let (place, function) = text.rsplit_once('.').unwrap_or((text, "0"));
        let (rest, device) = place.rsplit_once(':')?;
        let (domain, bus) = rest.split_once(':').unwrap_or(("0", rest));
        let number = |digits: &str| {
            // A sign is no digit.
            let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            u32::from_str_radix(digits, 16).ok().filter(|_| plain)
        };
        Some(BusId {
            domain: number(domain)?,
            bus: number(bus)?,
            device: number(device)?,
            function: number(function)?,
        })
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BusId { domain, bus, device, function } = self;
        write!(f, "{domain:04X}:{bus:02X}:{device:02X}.{function:X}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C133
    #[test]
    fn place_on_the_bus_is_read_with_and_without_its_optional_parts() {
        let place = |domain, bus, device, function| Some(BusId { domain, bus, device, function });
        assert_eq!(BusId::parse(b"0000:1A:00.0"), place(0, 0x1a, 0, 0));
        assert_eq!(BusId::parse(b"00000002:1a:1f.3"), place(2, 0x1a, 0x1f, 3));
        assert_eq!(BusId::parse(b"0001:1a:02"), place(1, 0x1a, 2, 0));
        assert_eq!(BusId::parse(b"1a:02.1"), place(0, 0x1a, 2, 1));
        for wrong in
            ["", "nonsense", "1a", "1a:", ":02", "1a:02.", "1:2:3:4", "+1:02", "1a:0x2", "100000000:1:2"]
        {
            assert_eq!(BusId::parse(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(BusId::parse(b"\xff:02"), None);
        let whole = "0002:1A:1F.3";
        assert_eq!(BusId::parse(whole.as_bytes()).map(|found| found.to_string()).as_deref(), Some(whole));
    }
}
