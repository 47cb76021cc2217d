//! `refrain store prune`: garbage of the object store that machines share.

use std::time::Duration;

use anyhow::Result;
use refrain::corpus::{Collector, GarbageOptions, GarbageReport};
use refrain::store::{Objects, RemoteOptions};
use serde_json::json;

use crate::args::Prune;
use crate::output::{Fail, bytes, count, print, print_json};
use crate::settings::Context;

/// The least time that a request may take: nobody waits for a single one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// `refrain store prune`
pub(super) fn run(context: &Context, args: &Prune) -> Result<()> {
    let url = context
        .global
        .remote
        .as_ref()
        .ok_or_else(|| Fail::usage("prune looks through an object store").hint("give --remote URL"))?;
    let mut remote = RemoteOptions::new(url);
    remote.timeout = context.global.remote_timeout.max(TIMEOUT);
    let objects = Objects::open(&remote)?;
    let mut options = GarbageOptions::default();
    (options.unused, options.grace) = (args.unused, args.grace);
    let spinner = context.spinner("looking through the object store");
    let collector = Collector::begin(&objects, &options)?;
    let report = if args.delete { collector.delete()? } else { collector.report().clone() };
    spinner.finish_and_clear();
    if context.json {
        let mut value = json!(report);
        value["remote"] = json!(url);
        return print_json(&value);
    }
    print(&text(&report, args.delete))
}

fn text(report: &GarbageReport, delete: bool) -> String {
    let GarbageReport { documents, chunks, unused, due, deleted, .. } = *report;
    let mut lines = format!(
        "{}, {} with {}, are there\nnot named by a document, and old enough: {}, {}\n",
        count(documents, "document"),
        count(chunks, "chunk"),
        bytes(report.bytes),
        count(unused, "chunk"),
        bytes(report.unused_bytes),
    );
    let what = if delete {
        format!("deleted: {}, {}", count(deleted, "chunk"), bytes(report.deleted_bytes))
    } else {
        format!("due: {}, {}; --delete deletes them", count(due, "chunk"), bytes(report.due_bytes))
    };
    let waiting = unused - due;
    lines.push_str(&format!("{what}\nnoted, to be deleted when their time of grace is over: {waiting}\n"));
    lines
}
