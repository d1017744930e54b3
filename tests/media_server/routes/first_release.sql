-- The database of the first release's schema (revision 0001), written by its own code (commit ea7d990): a clip done, a
-- clip that ran, a clip, a storyboard and a film that waited. sqlite3's dump; its files are not kept.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE api_keys (
	id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	prefix VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	scopes JSON NOT NULL, 
	quotas JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	last_used_at DOUBLE, 
	expires_at DOUBLE, 
	revoked_at DOUBLE, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id), 
	CONSTRAINT uq_api_keys_prefix UNIQUE (prefix)
);
CREATE TABLE artifacts (
	id VARCHAR NOT NULL, 
	job_id VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	sequence INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	"key" TEXT NOT NULL, 
	content_type VARCHAR NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_artifacts PRIMARY KEY (id), 
	CONSTRAINT fk_artifacts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_artifacts_job_id_attempt_name_sequence UNIQUE (job_id, attempt, name, sequence)
);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfb705796474c29a88784a7','video_01a22cbf0bf373c58177dfd193bf06da',1,'video',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/video.mp4','video/mp4',25,'4608cd481c11f53fae523854cdd3052d3cc1b5ae0036eddc018719f8927ae4b7',1.79604704817601299286e+09);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfd75ffbc31d5cdeecdd904','video_01a22cbf0bf373c58177dfd193bf06da',1,'thumbnail',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/thumbnail.jpg','image/jpeg',7,'2cea274d0bedc39ec4ab6ba9e59ec889e3ed6fb56a1cf088a64d9b383378dc97',1.79604704817601299286e+09);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfd75ffbc31d5ced7154cfd','video_01a22cbf0bf373c58177dfd193bf06da',1,'spritesheet',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/spritesheet.jpg','image/jpeg',7,'2cea274d0bedc39ec4ab6ba9e59ec889e3ed6fb56a1cf088a64d9b383378dc97',1.79604704817601299286e+09);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfd75ffbc31d5cf574b0a9b','video_01a22cbf0bf373c58177dfd193bf06da',1,'spritesheet_vtt',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/spritesheet.vtt','text/vtt',62,'1474105457e8ff7c4fc20f770e4720ef4b2d18aec6898f47db0cc62aab887adb',1.79604704817601299286e+09);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfd75ffbc31d5d01530ef26','video_01a22cbf0bf373c58177dfd193bf06da',1,'last_frame',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/last_frame.png','image/png',302,'3690824d18e3322fac39b593d5c57955dd5bb27580611452de9d593d13a07e96',1.79604704817601299286e+09);
INSERT INTO "artifacts" VALUES('art_01a22cbf0dfe710e9e2dc4eb785d370c','video_01a22cbf0bf373c58177dfd193bf06da',1,'manifest',0,'final','video_01a22cbf0bf373c58177dfd193bf06da/1/manifest.json','application/json',19,'645f05c51bf8bcf1b056aa2cb8735854d99e091484d0b017e45da29d22020e34',1.79604704817601299286e+09);
CREATE TABLE attempts (
	job_id VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker VARCHAR NOT NULL, 
	outcome VARCHAR NOT NULL, 
	error_code VARCHAR, 
	error_message TEXT, 
	gpu_seconds DOUBLE, 
	started_at DOUBLE NOT NULL, 
	ended_at DOUBLE, 
	CONSTRAINT pk_attempts PRIMARY KEY (job_id, attempt), 
	CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "attempts" VALUES('video_01a22cbf0bf373c58177dfd193bf06da',1,'scripted@test:1','completed',NULL,NULL,0.5,1.79604704775899648664e+09,1.79604704817601299286e+09);
INSERT INTO "attempts" VALUES('video_01a22cbf0e5870dcbbb27322b4505dfc',1,'scripted@test:1','running',NULL,NULL,NULL,1.79604704834000325204e+09,NULL);
CREATE TABLE checkpoints (
	job_id VARCHAR NOT NULL, 
	sequence INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	data JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, sequence), 
	CONSTRAINT fk_checkpoints_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE deliveries (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	outbox_id VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	started_at DOUBLE NOT NULL, 
	duration_s DOUBLE NOT NULL, 
	status_code INTEGER, 
	error TEXT, 
	CONSTRAINT fk_deliveries_outbox_id FOREIGN KEY(outbox_id) REFERENCES outbox (id) ON DELETE CASCADE, 
	CONSTRAINT uq_deliveries_outbox_id_number UNIQUE (outbox_id, number)
);
CREATE TABLE events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	v INTEGER NOT NULL, 
	job_id VARCHAR NOT NULL, 
	root_id VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	type VARCHAR NOT NULL, 
	data JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "events" VALUES(1,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',0,'job.queued','{"status": "queued"}',1.79604704767100667949e+09);
INSERT INTO "events" VALUES(2,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',1,'job.started','{"status": "in_progress", "attempt": 1}',1.79604704775899648664e+09);
INSERT INTO "events" VALUES(3,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',1,'job.progress','{"stage": "denoise", "step": 1, "total_steps": 3, "eta_s": 1.0, "progress": 25}',1.796047047888989687e+09);
INSERT INTO "events" VALUES(4,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',1,'job.progress','{"stage": "denoise", "step": 2, "total_steps": 3, "eta_s": 1.0, "progress": 50}',1.7960470479169919491e+09);
INSERT INTO "events" VALUES(5,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',1,'job.progress','{"stage": "denoise", "step": 3, "total_steps": 3, "eta_s": 1.0, "progress": 75}',1.79604704794201707838e+09);
INSERT INTO "events" VALUES(6,1,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',1,'video.completed','{"status": "completed"}',1.79604704817601299286e+09);
INSERT INTO "events" VALUES(7,1,'video_01a22cbf0e5870dcbbb27322b4505dfc','video_01a22cbf0e5870dcbbb27322b4505dfc',0,'job.queued','{"status": "queued"}',1.79604704828098106386e+09);
INSERT INTO "events" VALUES(8,1,'video_01a22cbf0e5870dcbbb27322b4505dfc','video_01a22cbf0e5870dcbbb27322b4505dfc',1,'job.started','{"status": "in_progress", "attempt": 1}',1.79604704834000325204e+09);
INSERT INTO "events" VALUES(9,1,'video_01a22cbf0e5870dcbbb27322b4505dfc','video_01a22cbf0e5870dcbbb27322b4505dfc',1,'job.progress','{"stage": "denoise", "step": 1, "total_steps": 3, "progress": 25}',1.79604704837500596045e+09);
INSERT INTO "events" VALUES(10,1,'video_01a22cbf0ee6729fafdffed36ae26844','video_01a22cbf0ee6729fafdffed36ae26844',0,'job.queued','{"status": "queued"}',1.7960470484279930591e+09);
INSERT INTO "events" VALUES(11,1,'storyboard_01a22cbf0fb1741fbca3ab0dc1210b6a','storyboard_01a22cbf0fb1741fbca3ab0dc1210b6a',0,'job.queued','{"status": "queued"}',1.79604704862501478191e+09);
INSERT INTO "events" VALUES(12,1,'film_01a22cbf0fff70a8830aa0fd99e1f903','film_01a22cbf0fff70a8830aa0fd99e1f903',0,'job.queued','{"status": "queued"}',1.79604704870298647885e+09);
INSERT INTO "events" VALUES(13,1,'storyboard_01a22cbf10027025b0df592cfde52d5c','film_01a22cbf0fff70a8830aa0fd99e1f903',0,'job.queued','{"status": "queued"}',1.79604704870298647885e+09);
CREATE TABLE garbage (
	prefix VARCHAR NOT NULL, 
	due_at DOUBLE NOT NULL, 
	CONSTRAINT pk_garbage PRIMARY KEY (prefix)
);
CREATE TABLE idempotency_keys (
	owner VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	request_sha256 VARCHAR NOT NULL, 
	job_id VARCHAR, 
	status_code INTEGER, 
	response TEXT, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (owner, "key")
);
CREATE TABLE jobs (
	id VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	pool VARCHAR NOT NULL, 
	priority INTEGER NOT NULL, 
	status VARCHAR NOT NULL, 
	stage VARCHAR, 
	owner_key_id VARCHAR, 
	queue_key VARCHAR NOT NULL, 
	parent_id VARCHAR, 
	root_id VARCHAR NOT NULL, 
	traceparent VARCHAR, 
	model VARCHAR, 
	params JSON NOT NULL, 
	metadata JSON NOT NULL, 
	label VARCHAR, 
	progress DOUBLE NOT NULL, 
	step INTEGER, 
	total_steps INTEGER, 
	eta_s DOUBLE, 
	attempt INTEGER NOT NULL, 
	uncounted INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	lease_until DOUBLE, 
	lease_owner VARCHAR, 
	cancel_requested_at DOUBLE, 
	error_code VARCHAR, 
	error_message TEXT, 
	result JSON, 
	gpu_seconds DOUBLE, 
	peak_memory_bytes BIGINT, 
	winning_attempt INTEGER, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	completed_at DOUBLE, 
	retention_s DOUBLE, 
	expires_at DOUBLE, 
	deleted_at DOUBLE, 
	doorbell_at DOUBLE, 
	not_before DOUBLE, 
	webhook_url TEXT, 
	remixed_from_id VARCHAR, 
	CONSTRAINT pk_jobs PRIMARY KEY (id), 
	CONSTRAINT fk_jobs_parent_id FOREIGN KEY(parent_id) REFERENCES jobs (id)
);
INSERT INTO "jobs" VALUES('video_01a22cbf0bf373c58177dfd193bf06da','video','video',0,'completed',NULL,NULL,'',NULL,'video_01a22cbf0bf373c58177dfd193bf06da','00-0d2718362a204c31b0cd72e4c2663250-7f222d6755df885d-00','tiny-wan','{"size": "160x96", "width": 160, "height": 96, "fps": 16, "num_frames": 17, "seconds": 1.0625, "seed": 1, "num_inference_steps": 8, "guidance_scale": 3.0, "guidance_scale_2": null, "flow_shift": null, "attention": {"mode": "dense", "density": null, "dense_steps": null, "dense_layers": null}, "extend": null, "output": {"container": "mp4", "codec": "h264", "crf": null, "image_sequence": null}, "inputs": {}, "model_hash": "sha256:00", "adjusted": []}','{"scene": "1"}',NULL,100.0,3,3,NULL,1,0,3,NULL,NULL,NULL,NULL,NULL,'{"drift": {"verdict": "none"}}',0.5,1048576,1,1.79604704767100667949e+09,1.79604704775899648664e+09,1.79604704817601299286e+09,NULL,NULL,NULL,1.79604704767100667949e+09,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('video_01a22cbf0e5870dcbbb27322b4505dfc','video','video',0,'in_progress','denoise',NULL,'',NULL,'video_01a22cbf0e5870dcbbb27322b4505dfc','00-2e27d7c10075eb96a60f49c354ab25e6-b10bd5086e73f4b1-00','tiny-wan','{"size": "160x96", "width": 160, "height": 96, "fps": 16, "num_frames": 17, "seconds": 1.0625, "seed": 2, "num_inference_steps": 8, "guidance_scale": 3.0, "guidance_scale_2": null, "flow_shift": null, "attention": {"mode": "dense", "density": null, "dense_steps": null, "dense_layers": null}, "extend": null, "output": {"container": "mp4", "codec": "h264", "crf": null, "image_sequence": null}, "inputs": {}, "model_hash": "sha256:00", "adjusted": []}','{"scene": "2"}',NULL,25.0,1,3,NULL,1,0,3,1.79604706837500596042e+09,'scripted@test:1',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1.79604704828098106386e+09,1.79604704834000325204e+09,NULL,NULL,NULL,NULL,1.79604704828098106386e+09,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('video_01a22cbf0ee6729fafdffed36ae26844','video','video',0,'queued',NULL,NULL,'',NULL,'video_01a22cbf0ee6729fafdffed36ae26844','00-daefa0f912df3569fe4aee6d22f1b06f-8e3d96fbd53ef3e8-00','tiny-wan','{"size": "160x96", "width": 160, "height": 96, "fps": 16, "num_frames": 17, "seconds": 1.0625, "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "guidance_scale_2": null, "flow_shift": null, "attention": {"mode": "dense", "density": null, "dense_steps": null, "dense_layers": null}, "extend": null, "output": {"container": "mp4", "codec": "h264", "crf": null, "image_sequence": null}, "inputs": {}, "model_hash": "sha256:00", "adjusted": []}','{"scene": "3"}',NULL,0.0,NULL,NULL,NULL,0,0,3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1.7960470484279930591e+09,NULL,NULL,NULL,NULL,NULL,1.7960470484279930591e+09,NULL,'https://hooks.example.org/x',NULL);
INSERT INTO "jobs" VALUES('storyboard_01a22cbf0fb1741fbca3ab0dc1210b6a','storyboard','text',0,'queued',NULL,NULL,'',NULL,'storyboard_01a22cbf0fb1741fbca3ab0dc1210b6a','00-5f84a73b4cd862a04cce67e7dd588cd4-5dccda4c830e4b49-00',NULL,'{"seconds": 4.0, "num_frames": 64, "shots": 2, "fps": 16, "seed": 8995673994278247, "video_model": "tiny-wan"}','{}',NULL,0.0,NULL,NULL,NULL,0,0,3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1.79604704862501478191e+09,NULL,NULL,NULL,NULL,NULL,1.79604704862501478191e+09,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('film_01a22cbf0fff70a8830aa0fd99e1f903','film','films',0,'queued',NULL,NULL,'',NULL,'film_01a22cbf0fff70a8830aa0fd99e1f903','00-d82abd766fd82887db355a5f01bdacbf-1ab634795974c0a7-00','tiny-wan','{"seconds": 4.0, "num_frames": 64, "shots": 2, "size": "160x96", "fps": 16, "seed": 4, "video_model": "tiny-wan", "clip": {}, "shot_retries": 2, "max_attempts": 3}','{}',NULL,0.0,NULL,NULL,NULL,0,0,1,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1.79604704870298647885e+09,NULL,NULL,NULL,NULL,NULL,1.79604704870298647885e+09,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('storyboard_01a22cbf10027025b0df592cfde52d5c','storyboard','text',0,'queued',NULL,NULL,'','film_01a22cbf0fff70a8830aa0fd99e1f903','film_01a22cbf0fff70a8830aa0fd99e1f903','00-d82abd766fd82887db355a5f01bdacbf-1ab634795974c0a7-00',NULL,'{"seconds": 4.0, "num_frames": 64, "shots": 2, "size": "160x96", "fps": 16, "seed": 4, "video_model": "tiny-wan"}','{}',NULL,0.0,NULL,NULL,NULL,0,0,3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1.79604704870298647885e+09,NULL,NULL,NULL,NULL,NULL,1.79604704870298647885e+09,NULL,NULL,NULL);
CREATE TABLE models (
	name VARCHAR NOT NULL, 
	worker VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	pool VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	card JSON NOT NULL, 
	published_at DOUBLE NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	CONSTRAINT pk_models PRIMARY KEY (name, worker)
);
INSERT INTO "models" VALUES('tiny-wan','scripted@test:1','video','video','sha256:00','{"v": 1, "name": "tiny-wan", "pool": "video", "revision": "test", "hash": "sha256:00", "license": "Apache-2.0", "origin": "drawn for the tests", "kind": "video", "layout": "wan-ti2v", "size": {"default": "160x96", "multiple_of": 16, "min": [64, 64], "max": [256, 256], "max_pixels": 36864, "trained": ["160x96"]}, "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4}, "fps": 16, "fps_range": [1, 60], "defaults": {"num_inference_steps": 8, "guidance_scale": 3.0, "guidance_scale_2": null, "seconds": 2.0, "flow_shift": null, "negative_prompt": "", "scheduler": "unipc"}, "limits": {"max_prompt_chars": 500, "max_steps": 50, "max_seconds": 30.0, "max_guidance_scale": 20.0}, "cost": {"seconds_fixed": 0.0, "seconds_per_step_token": 0.0, "seconds_per_frame_pixel": 0.0, "bytes_fixed": 0.0, "bytes_per_token": 0.0}, "conditions": ["text", "first_frame", "last_frame", "overlap"], "attention": ["dense"], "on_drift": ["report"], "caption_style": null}',1.79604704726199650762e+09,1.79604704726199650762e+09);
INSERT INTO "models" VALUES('smollm2-135m-instruct','engine@test:1','text','text','sha256:01','{"v": 1, "name": "smollm2-135m-instruct", "pool": "text", "revision": "test", "hash": "sha256:01", "license": "Apache-2.0", "origin": "none", "kind": "text", "context_length": 8192, "tokenizer": "models/smollm2-135m-instruct/01/tokenizer.json", "chat_template": null, "bos": null, "eos_token_ids": [2], "defaults": {"temperature": 1.0, "top_p": 1.0, "max_tokens": null}}',1.79604704731498360636e+09,1.79604704731498360636e+09);
CREATE TABLE outbox (
	id VARCHAR NOT NULL, 
	event_seq BIGINT NOT NULL, 
	job_id VARCHAR NOT NULL, 
	owner_key_id VARCHAR, 
	endpoint_id VARCHAR, 
	url TEXT, 
	type VARCHAR NOT NULL, 
	payload TEXT NOT NULL, 
	state VARCHAR NOT NULL, 
	attempts INTEGER NOT NULL, 
	next_at DOUBLE, 
	lease_until DOUBLE, 
	lease_owner VARCHAR, 
	created_at DOUBLE NOT NULL, 
	settled_at DOUBLE, 
	CONSTRAINT pk_outbox PRIMARY KEY (id), 
	CONSTRAINT fk_outbox_endpoint_id FOREIGN KEY(endpoint_id) REFERENCES webhook_endpoints (id) ON DELETE CASCADE, 
	CONSTRAINT fk_outbox_job_id FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_outbox_event_seq_endpoint_id UNIQUE (event_seq, endpoint_id)
);
CREATE TABLE prompts (
	job_id VARCHAR NOT NULL, 
	field VARCHAR NOT NULL, 
	text TEXT NOT NULL, 
	CONSTRAINT pk_prompts PRIMARY KEY (job_id, field), 
	CONSTRAINT fk_prompts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "prompts" VALUES('video_01a22cbf0bf373c58177dfd193bf06da','prompt','a red ball moving left');
INSERT INTO "prompts" VALUES('video_01a22cbf0e5870dcbbb27322b4505dfc','prompt','a blue star spinning');
INSERT INTO "prompts" VALUES('video_01a22cbf0ee6729fafdffed36ae26844','prompt','a green car moving up');
INSERT INTO "prompts" VALUES('storyboard_01a22cbf0fb1741fbca3ab0dc1210b6a','idea','a ball finds a friend');
INSERT INTO "prompts" VALUES('film_01a22cbf0fff70a8830aa0fd99e1f903','idea','a red ball rolls home');
INSERT INTO "prompts" VALUES('storyboard_01a22cbf10027025b0df592cfde52d5c','idea','a red ball rolls home');
CREATE TABLE turns (
	pool VARCHAR NOT NULL, 
	queue_key VARCHAR NOT NULL, 
	turn BIGINT NOT NULL, 
	CONSTRAINT pk_turns PRIMARY KEY (pool, queue_key)
);
INSERT INTO "turns" VALUES('video','',2);
INSERT INTO "turns" VALUES('text','',0);
CREATE TABLE usage (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	created_at DOUBLE NOT NULL, 
	owner_key_id VARCHAR, 
	job_id VARCHAR, 
	root_id VARCHAR, 
	label VARCHAR, 
	model VARCHAR, 
	kind VARCHAR NOT NULL, 
	amount DOUBLE NOT NULL
);
INSERT INTO "usage" VALUES(1,1.79604704817601299286e+09,NULL,'video_01a22cbf0bf373c58177dfd193bf06da','video_01a22cbf0bf373c58177dfd193bf06da',NULL,'tiny-wan','gpu_seconds',0.5);
CREATE TABLE webhook_endpoints (
	id VARCHAR NOT NULL, 
	owner_key_id VARCHAR, 
	name VARCHAR NOT NULL, 
	url TEXT NOT NULL, 
	event_types JSON NOT NULL, 
	secret TEXT NOT NULL, 
	old_secret TEXT, 
	old_secret_until DOUBLE, 
	is_enabled BOOLEAN NOT NULL, 
	disabled_reason TEXT, 
	failing_since DOUBLE, 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	CONSTRAINT pk_webhook_endpoints PRIMARY KEY (id)
);
CREATE INDEX ix_garbage_due ON garbage (due_at);
CREATE INDEX ix_idempotency_keys_expires ON idempotency_keys (expires_at);
CREATE INDEX ix_jobs_created ON jobs (created_at, id);
CREATE INDEX ix_jobs_doorbell ON jobs (status, pool, doorbell_at);
CREATE INDEX ix_jobs_expires ON jobs (expires_at);
CREATE INDEX ix_jobs_kind ON jobs (kind, created_at, id);
CREATE INDEX ix_jobs_lease ON jobs (status, lease_until);
CREATE INDEX ix_jobs_lease_owner ON jobs (lease_owner);
CREATE INDEX ix_jobs_owner ON jobs (owner_key_id, created_at, id);
CREATE INDEX ix_jobs_parent ON jobs (parent_id, created_at, id);
CREATE INDEX ix_jobs_queue ON jobs (pool, status, queue_key, priority DESC, created_at, id);
CREATE INDEX ix_jobs_root ON jobs (root_id);
CREATE INDEX ix_models_seen ON models (seen_at);
CREATE INDEX ix_turns_next ON turns (pool, turn, queue_key);
CREATE INDEX ix_usage_owner ON usage (owner_key_id, created_at);
CREATE INDEX ix_usage_root ON usage (root_id);
CREATE INDEX ix_webhook_endpoints_owner ON webhook_endpoints (owner_key_id);
CREATE INDEX ix_events_job ON events (job_id, seq);
CREATE INDEX ix_events_root ON events (root_id, seq);
CREATE INDEX ix_outbox_due ON outbox (state, next_at);
CREATE INDEX ix_outbox_endpoint ON outbox (endpoint_id, created_at);
CREATE INDEX ix_outbox_job ON outbox (job_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',13);
INSERT INTO "sqlite_sequence" VALUES('usage',1);
COMMIT;
