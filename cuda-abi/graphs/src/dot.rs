//! The text of `cuGraphDebugDotPrint`, in the language of Graphviz.

use std::fmt::Write as _;

use crate::graph::{Model, NodeWork, Result};
use crate::plan::{EdgeData, KernelWork, Work};

// `CUgraphDebugDot_flags`.
const VERBOSE: u32 = 1;
const KERNELS: u32 = 1 << 2;
const COPIES: u32 = 1 << 3;
const FILLS: u32 = 1 << 4;
const HOSTS: u32 = 1 << 5;
const EVENTS: u32 = 1 << 6;
const ATTRIBUTES: u32 = 1 << 9;
const HANDLES: u32 = 1 << 10;
const OPERATIONS: u32 = 1 << 13;
const CONDITIONS: u32 = 1 << 15;

/// Describes a graph and its child graphs.
pub(crate) fn text(model: &Model, graph: u64, flags: u32) -> Result<String> {
    let mut text = String::from("digraph dot {\n");
    let mut pending = vec![graph];
    while let Some(graph) = pending.pop() {
        cluster(model, graph, flags, &mut text, &mut pending)?;
    }
    text.push_str("}\n");
    Ok(text)
}

fn cluster(model: &Model, handle: u64, flags: u32, text: &mut String, children: &mut Vec<u64>) -> Result {
    let graph = model.graph(handle)?;
    let id = graph.id;
    put(text, format_args!("subgraph cluster_{id} {{\nlabel=\"graph_{id}\" graph[style=\"dashed\"];\n"));
    for node_handle in &graph.nodes {
        let node = model.node(*node_handle)?;
        let number = node.number;
        let mut label = format!("{number}\\n{}", name(&node.work));
        if let NodeWork::Child(child) = node.work {
            put(&mut label, format_args!("\\ngraph_{}", model.graph(child)?.id));
            children.push(child);
        }
        if let NodeWork::Conditional(conditional) = &node.work {
            for body in &conditional.bodies {
                put(&mut label, format_args!("\\ngraph_{}", model.graph(*body)?.id));
                children.push(*body);
            }
            if flags & (CONDITIONS | VERBOSE) != 0 {
                let (kind, handle) = (conditional.kind, conditional.handle);
                put(&mut label, format_args!("\\n{kind:?} handle {handle:#x}"));
            }
        }
        if let NodeWork::Plain(work) = &node.work {
            details(work, flags, &mut label);
        }
        if flags & (HANDLES | VERBOSE) != 0 {
            put(&mut label, format_args!("\\nhandle {node_handle:#x}"));
        }
        put(
            text,
            format_args!(
                "\"graph_{id}_node_{number}\"[style=\"solid\" shape=\"rectangle\" label=\"{label}\"];\n"
            ),
        );
        for (from, edge) in &node.before {
            let from = model.node(*from)?.number;
            let style = if *edge == EdgeData::default() { "" } else { "[style=\"dashed\"]" };
            put(text, format_args!("\"graph_{id}_node_{from}\" -> \"graph_{id}_node_{number}\"{style};\n"));
        }
    }
    text.push_str("}\n");
    Ok(())
}

fn put(text: &mut String, part: std::fmt::Arguments<'_>) {
    // A String takes all text.
    let _ = text.write_fmt(part);
}

fn name(work: &NodeWork) -> &'static str {
    match work {
        NodeWork::Child(_) | NodeWork::Plain(Work::Child(_)) => "CHILD GRAPH",
        NodeWork::Conditional(_) | NodeWork::Plain(Work::Conditional(_)) => "CONDITIONAL",
        NodeWork::Plain(work) => match work {
            Work::Kernel(_) => "KERNEL",
            Work::Copy { .. } => "MEMCPY",
            Work::Fill { .. } => "MEMSET",
            Work::Host(_) => "HOST",
            Work::EventWait { .. } => "EVENT_WAIT",
            Work::EventRecord { .. } => "EVENT_RECORD",
            Work::MemoryOperations { .. } => "BATCH_MEM_OP",
            Work::Allocation(_) => "MEM_ALLOC",
            Work::Free { .. } => "MEM_FREE",
            Work::Empty | Work::Child(_) | Work::Conditional(_) => "EMPTY",
        },
    }
}

fn details(work: &Work, flags: u32, label: &mut String) {
    let shows = |flag: u32| flags & (flag | VERBOSE) != 0;
    match work {
        Work::Kernel(kernel) => {
            let KernelWork { function, grid, block, shared, attributes, .. } = kernel;
            if shows(KERNELS) {
                put(
                    label,
                    format_args!(
                        "\\nfunction {function:#x} grid {grid:?} block {block:?} shared memory {shared}"
                    ),
                );
            }
            if shows(ATTRIBUTES) {
                let ids: Vec<u32> = attributes.iter().map(|attribute| attribute.id).collect();
                put(label, format_args!("\\nattributes {ids:?}"));
            }
        }
        Work::Copy { copy, .. } if shows(COPIES) => {
            put(label, format_args!("\\n{} x {} x {} bytes", copy.width, copy.height, copy.depth));
        }
        Work::Fill { fill, .. } if shows(FILLS) => put(
            label,
            format_args!(
                "\\n{:#x} value {:#x} element {} width {} height {}",
                fill.to, fill.value, fill.element, fill.width, fill.height
            ),
        ),
        Work::Host(host) if shows(HOSTS) => {
            put(label, format_args!("\\nfunction {:#x} data {:#x}", host.function, host.data));
        }
        Work::EventWait { event } | Work::EventRecord { event } if shows(EVENTS) => {
            put(label, format_args!("\\nevent {event:#x}"));
        }
        Work::MemoryOperations { operations, .. } if shows(OPERATIONS) => {
            put(label, format_args!("\\n{} operations", operations.len()));
        }
        _ => {}
    }
}
