//! The guest machinery itself, without Sluice: the base of the VM tests.

use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::image::Image;
use sluice_tests::paths::Binaries;
use sluice_tests::vm::{Gpu, Guest, GuestCommand, Machine};

fn boot(series: Series, packed: bool) -> Result<Guest> {
    let kernel = Kernel::fetch(series)?;
    let image = Image::new(&kernel, &Binaries::locate()?)?;
    let machine = Machine { gpu: Gpu::Plain, packed, ..Machine::new(&format!("guest-{series}")) };
    Guest::boot(&machine, &kernel, &image)
}

#[test]
fn stock_6_1_kernel_gives_the_ordinary_user_its_render_node() -> Result<()> {
    gives_the_ordinary_user_its_render_node(Series::V6_1)
}

#[test]
fn stock_6_12_kernel_gives_the_ordinary_user_its_render_node() -> Result<()> {
    gives_the_ordinary_user_its_render_node(Series::V6_12)
}

fn gives_the_ordinary_user_its_render_node(series: Series) -> Result<()> {
    let guest = boot(series, true)?;
    assert!(guest.hello()?.kernel.starts_with(&format!("{series}.")));
    let open = "id -un && exec 3<>/dev/dri/renderD128 && echo opened";
    assert_eq!(guest.run(open)?.expect_success()?.stdout, "cuda\nopened\n");
    let stranger = guest.start(&GuestCommand::script(open).user("other"))?.wait()?;
    assert!(!stranger.success(), "a user outside of group render must not open it");
    assert!(!guest.run("exec 3<>/dev/dri/card0")?.success());
    guest.power_off()
}

#[test]
fn agent_commands_run_concurrently_and_are_signalled_separately() -> Result<()> {
    let guest = boot(Series::V6_12, false)?;
    let doomed = guest.start(&GuestCommand::program(&["sleep", "1000"]))?;
    let waiting = guest
        .start(&GuestCommand::script("echo ready; while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 5"))?;
    waiting.wait_for_output("ready", Duration::from_secs(60))?;
    doomed.signal(Signal::KILL)?;
    let doomed = doomed.wait()?;
    assert_eq!((doomed.code, doomed.signal), (None, Some(9)));
    guest.put("/tmp/go", 0o644, b"")?;
    assert_eq!(waiting.wait()?.code, Some(5));

    let many = guest.run("seq 1 100000; echo to stderr >&2")?.expect_success()?;
    assert_eq!(many.stdout.lines().last(), Some("100000"));
    assert_eq!((many.stdout.len(), many.stderr.as_str()), (588_895, "to stderr\n"));

    let contents: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    guest.put("/tmp/file", 0o755, &contents)?;
    assert_eq!(guest.run("stat -c '%s %a' /tmp/file")?.stdout, "400000 755\n");
    guest.power_off()
}

#[test]
fn guest_agent_answers_again_after_reboot_and_reset() -> Result<()> {
    let guest = boot(Series::V6_12, false)?;
    let first = guest.hello()?.boot_id;
    let lost = guest.start(&GuestCommand::program(&["sleep", "1000"]))?;
    guest.reset()?;
    assert!(lost.wait().is_err());
    let second = guest.hello()?.boot_id;
    assert_ne!(first, second);
    guest.reboot()?;
    assert_ne!(second, guest.hello()?.boot_id);
    assert_eq!(guest.run("echo alive")?.stdout, "alive\n");
    guest.kill()
}
