//! Loads PTX files as a device of the highest capability does, and prints the reason for each file that does not load and each
//! kernel that cannot run.

use softgpu_engine::Module;

fn main() {
    let mut bad = 0;
    for path in std::env::args().skip(1) {
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) => {
                eprintln!("{path}: {e}");
                bad += 1;
                continue;
            }
        };
        match Module::load(&text, 120) {
            Ok(m) => {
                println!("{path}: {} kernels, {} globals", m.kernels().len(), m.globals().len());
                for refusal in m.kernels().iter().filter_map(|kernel| kernel.refusal.as_ref()) {
                    println!("{path}: {refusal}");
                    bad += 1;
                }
            }
            Err(e) => {
                println!("{path}: {:?}: {e}", e.kind);
                bad += 1;
            }
        }
    }
    std::process::exit(i32::from(bad > 0));
}
