//! Reports of a run: HTML, Markdown and CSV.
//!
//! Records are sorted once (`data`) and made into tables and figures (`table`) that HTML and Markdown both show. A paper's
//! own numbers (`published`) stand in tables of their own.

mod claims;
mod csv;
mod data;
mod figures;
mod html;
mod markdown;
mod measures;
mod overview;
mod papers;
mod picture;
mod scores;
mod stats;
mod svg;
mod table;
mod tables;
#[cfg(test)]
mod tests;
mod variant_name;

use crate::{Record, RunInfo};
use table::Section;

/// A run in words, tables and figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// One file that loads nothing.
    pub html: String,
    /// All tables as Markdown, without figures.
    pub markdown: String,
    /// Every quantity a line: `model,benchmark,task,length,depth,method,policy,name,value,low,high,samples,scale`.
    pub csv: String,
    /// Quality against time as one SVG file, where a method was timed.
    pub front: Option<String>,
}

/// The report of a run. Aggregate several records of one model, task, sample, method and policy the last counts.
pub fn report(about: &RunInfo, records: &[Record]) -> Report {
    let data = data::Data::new(about, records);
    let sections = sections(&data);
    let title = format!("Evaluation: {}", data.models.join(", "));
    Report {
        html: html::render(&title, &sections),
        markdown: markdown::render(&title, &sections),
        csv: csv::render(&data),
        front: figures::scatter(&data).map(|figure| picture::picture(&figure)),
    }
}

fn sections(data: &data::Data<'_>) -> Vec<Section> {
    let mut sections = vec![overview::summary(data), overview::heading(data)];
    sections.extend(papers::sections(data));
    sections.extend(figures::section(data));
    sections.extend(claims::section(data));
    sections.retain(|section| !section.blocks.is_empty());
    sections
}
