//! Text from a hostile guest: the engine may fail to load or execute it, but never panics.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::common::{Buffer, Host, Table};
use crate::images::{Array, Extents, plain};
use proptest::prelude::*;
use softgpu_engine::{
    ChannelType, Filter, Format, Images, Launch, Module, Pool, Sampler, Shape, Surface, Texture,
};

const SOURCES: [&str; 8] = [
    include_str!("data/collective.ptx"),
    include_str!("data/matrix.ptx"),
    include_str!("data/sync.ptx"),
    include_str!("data/runtime.ptx"),
    include_str!("data/elementwise.ptx"),
    include_str!("data/textures.ptx"),
    include_str!("data/surfaces.ptx"),
    include_str!("data/barriers.ptx"),
];

/// A table in which every handle is a texture and a surface of one small array.
struct AnyImage(Array);

impl AnyImage {
    fn new() -> AnyImage {
        let format = Format { channel: ChannelType::U8, channels: 4 };
        AnyImage(Array::new(Shape::D2Layered, format, Extents(5, 7, 1, 3, 2)))
    }
}

impl Images for AnyImage {
    fn texture(&self, _: u64) -> Option<Arc<Texture>> {
        let sampler =
            Sampler { filter: Filter::Linear, promote: true, mip_filter: Filter::Linear, ..plain() };
        Some(Arc::new(Texture { image: Arc::clone(&self.0.image), sampler }))
    }

    fn surface(&self, _: u64) -> Option<Arc<Surface>> {
        Some(Arc::new(Surface { image: Arc::clone(&self.0.image) }))
    }
}

/// One kernel of a source, with the text before the first function.
fn piece(source: usize, pick: usize) -> String {
    let text = SOURCES[source % SOURCES.len()];
    let first = text.find(".visible .entry").unwrap_or(0);
    let starts: Vec<usize> = text.match_indices(".visible .entry").map(|m| m.0).collect();
    let n = pick % starts.len();
    let end = starts.get(n + 1).copied().unwrap_or(text.len());
    format!("{}{}", &text[..first], &text[starts[n]..end])
}

/// Counts panics on any thread: a worker reports a panic as a failed launch, so the launch's result would hide it.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn watch_panics() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        let old = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            old(info);
        }));
    });
}

/// Loads the text and, if it loads, executes its kernels briefly with little memory.
fn try_out(text: &[u8]) {
    watch_panics();
    let Ok(module) = Module::load(text, 80) else { return };
    let module = Arc::new(module);
    let memory = Buffer::zeroed(1 << 16);
    let mut table = Table::default();
    table.ranges.push((memory.range(), true));
    for n in 0..module.globals().len() {
        if module.globals()[n].size < 1 << 20 {
            module.initial_bytes(n, &|_| memory.addr());
        }
    }
    let linked = module.link(vec![memory.addr(); module.globals().len()]);
    let host = Host::default();
    let images = AnyImage::new();
    let params: Vec<u8> = (0..16).flat_map(|n| (memory.addr() + n * 1024).to_le_bytes()).collect();
    for kernel in 0..module.kernels().len() {
        if module.kernels()[kernel].static_shared > 1 << 20 {
            continue;
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let done = s.spawn(|| {
                let _ = Pool::new(1).run(&Launch {
                    module: &linked,
                    kernel,
                    grid: [2, 1, 1],
                    block: [40, 1, 1],
                    dynamic_shared: 256,
                    params: &params,
                    cooperative: None,
                    resident_ctas: 4,
                    memory: &table,
                    images: &images,
                    references: &[],
                    runtime: &host,
                    stop: &stop,
                    deadline: None,
                    grid_id: 1,
                });
            });
            for _ in 0..200 {
                if done.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
    assert!(images.0.surroundings_are_whole(), "a store left the image");
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a worker panicked");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_bytes_never_panic(source in 0usize..8, pick in 0usize..20, edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut text = piece(source, pick).into_bytes();
        for (at, byte) in edits {
            let at = at.index(text.len());
            text[at] = byte;
        }
        try_out(&text);
    }

    #[test]
    fn shuffled_tokens_never_panic(source in 0usize..8, pick in 0usize..20, swaps in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u8..3), 1..5)) {
        let text = piece(source, pick);
        // Swaps words and separators, so that most results still parse.
        let mut words: Vec<&str> = text.split_inclusive([' ', '\t', ',', '.', '[', ']', '{', '}', '\n']).collect();
        for (a, b, how) in swaps {
            let (a, b) = (a.index(words.len()), b.index(words.len()));
            match how {
                0 => words.swap(a, b),
                1 => words[a] = words[b],
                _ => { words.remove(a); }
            }
        }
        try_out(words.concat().as_bytes());
    }

    #[test]
    fn random_bytes_never_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Module::load(&text, 80);
        let mut with_head = b".version 8.0\n.target sm_80\n".to_vec();
        with_head.extend(text);
        let _ = Module::load(&with_head, 80);
    }
}

#[test]
fn sources_with_huge_sizes_or_deep_nesting_are_refused() {
    let head = ".version 8.0\n.target sm_80\n.address_size 64\n";
    let refuse = |text: String| {
        let module = Module::load(text.as_bytes(), 80);
        let runs = module.is_ok_and(|module| module.kernels().iter().any(|kernel| kernel.refusal.is_none()));
        assert!(!runs, "{text}");
    };
    refuse(format!("{head}.global .b8 x[{}] = {{1}};", u32::MAX));
    refuse(format!("{head}.global .b8 x[4000000000][4000000000][4000000000];"));
    refuse(format!("{head}.global .b32 x = {}1{};", "(".repeat(100_000), ")".repeat(100_000)));
    refuse(format!("{head}.global .b32 x = {}1;", "-".repeat(100_000)));
    refuse(format!("{head}.visible .entry k() {{ {} ret; {} }}", "{".repeat(100_000), "}".repeat(100_000)));
    refuse(format!("{head}.visible .entry k() {{ .local .b8 l[4000000000]; ret; }}"));
    refuse(format!("{head}.visible .entry k() {{ .shared .b8 l[4000000000]; ret; }}"));
    refuse(format!("{head}.visible .entry k(.param .b8 l[4000000000]) {{ ret; }}"));
    refuse(format!("{head}.func f(.param .b8 l[4000000000]) {{ ret; }}"));
    refuse(format!("{head}.visible .entry k() {{ .param .b8 l[4000000]; ret; }}"));
    // A family of registers takes no memory until one is used.
    let text =
        format!("{head}.visible .entry k() {{ .reg .b64 %r<4000000000>; mov.u64 %r3999999999, 0; ret; }}");
    assert!(Module::load(text.as_bytes(), 80).is_ok());
}
