//! The list of models: those of all workers, of which each lists its own.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse as _;
use futures_util::future::join_all;
use refrain_server::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Gateway;
use super::plan::Planned;
use super::proxy::{Asked, Outgoing};

/// Most bytes of a worker's list.
const MAX_LIST: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
struct ModelList {
    object: String,
    data: Vec<Box<RawValue>>,
}

impl Gateway {
    /// Has a worker of each model answer a request for the list of models, and gives all lists as one.
    ///
    /// # Errors
    /// If the models of a name cannot be asked for.
    pub(super) async fn models(&self, request: &Outgoing) -> Result<Response<Body>, ApiError> {
        let ask = |model: Option<String>| {
            let planned = Planned::default();
            let asked = Arc::new(Asked {
                request: request.clone(),
                model,
                chat: None,
                planned,
                is_repeatable: false,
            });
            async move { self.answer(&asked).await }
        };
        let names = self.0.fleet.models();
        if names.len() < 2 {
            return ask(None).await;
        }
        let mut all = ModelList { object: "list".to_owned(), data: Vec::new() };
        for answer in join_all(names.into_iter().map(|name| ask(Some(name)))).await {
            let answer = answer?;
            if answer.status() != StatusCode::OK {
                return Ok(answer);
            }
            let list = to_bytes(answer.into_body(), MAX_LIST).await.ok();
            let list = list.and_then(|list| serde_json::from_slice::<ModelList>(&list).ok());
            let broken =
                || ApiError::new(StatusCode::BAD_GATEWAY, "a worker's list of models cannot be read");
            all.data.extend(list.ok_or_else(broken)?.data);
        }
        Ok(axum::Json(all).into_response())
    }
}
